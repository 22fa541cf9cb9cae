"""`elastic plan RECIPE`: which layouts fit a device, how fast they are, and what a run costs."""
