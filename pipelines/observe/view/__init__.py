"""What a person sees of a run: the terminal's display and the timeline picture.

Nothing is imported here: the picture's library takes time that most commands need not spend.
"""
