"""Mending: bringing back what a fine-tuned model has forgotten, between the anchors of old and new."""
