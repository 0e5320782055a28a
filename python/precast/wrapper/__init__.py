"""`maybe_compile`: regions of a module, what answers their calls, and the releases behind them."""
