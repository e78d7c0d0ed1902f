"""The lab reads the folders of runs. The core never imports it."""
