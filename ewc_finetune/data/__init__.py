"""Data: addresses like `mnist?rotate=30` in, batches that suit the model out."""
