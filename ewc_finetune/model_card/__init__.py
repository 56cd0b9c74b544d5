"""The model card of a published anchor: our section and front matter in a README.md that is otherwise people's own."""
