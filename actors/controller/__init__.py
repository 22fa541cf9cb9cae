"""The controller's shell around the pure core: inbox, journal, watch, fleet protocol."""
