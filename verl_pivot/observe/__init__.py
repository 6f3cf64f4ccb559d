"""What a run tells about itself: the event log, and the timeline, picture, trace, report and metrics made from it."""
