"""The controller's shell around the core: inbox, journal, watch, fleet protocol."""
