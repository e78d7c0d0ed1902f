"""What a finished run is good for: its model read back on any machine, exported to Hugging Face, tried out."""
