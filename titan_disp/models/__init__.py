"""The models and their shared code. ``registry`` lists the models, one file each."""
