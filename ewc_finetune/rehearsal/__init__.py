"""Rehearsal: inputs of the old domains go through the model beside the new ones, towards its old answers."""
