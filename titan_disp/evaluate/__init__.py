"""Hugging Face models on the tasks of lm-evaluation-harness, compared document by document: ``titan-disp evaluate``."""
