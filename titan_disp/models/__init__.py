"""What models have in common. It knows none of them: each is a folder of its own (CONTRIBUTING.md), listed in ``registry``."""
