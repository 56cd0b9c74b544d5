"""The penalty of a stack of anchors."""
