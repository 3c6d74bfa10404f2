"""pd-cache under engines and caches that others wrote, each over an `ObjectCache`. No module here imports its
peer when it is imported."""
