"""What every page is drawn with: the building blocks of a page, charts with their ticks and smoothing, the timeline.

Nothing here knows what a run is. Style and scripts stand in `pages/assets/`; all of it goes into the file of a page.
"""
