"""The verbs: what the package does, a file each; the commands call them and so does Python."""
