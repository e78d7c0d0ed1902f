"""This package holds the models, each in a file that ``registry`` lists, and what all
of them share.
"""
