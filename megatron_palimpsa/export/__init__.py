"""A stage's model as a folder for Hugging Face's transformers, and back."""
