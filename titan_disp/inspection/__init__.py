"""Looking into trained models: condensation of runs and of Hugging Face models, on the same text."""
