"""What a layout needs: the memory model and the step-time model."""
