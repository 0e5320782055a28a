"""Changes of graphs: the passes of a spec, and those of the worker itself."""
