"""Controller: the core and what moves it from phase to phase."""
