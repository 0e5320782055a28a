"""The command and releases from Python: builds, documents as objects, progress, loading."""
