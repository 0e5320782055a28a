"""Values of inputs and indices: sample inputs, bounds, and checks of them on a device."""
