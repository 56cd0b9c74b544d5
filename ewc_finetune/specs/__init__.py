"""The notations that data, architectures and ranges are written in."""
