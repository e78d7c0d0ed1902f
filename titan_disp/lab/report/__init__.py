"""This package writes an HTML page about one run or several, from the files in their
folders: ``titan-disp report``.
"""
