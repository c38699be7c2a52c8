"""The error of schedules."""

from plans.errors import TwofoldError


class ScheduleError(TwofoldError):
    """A schedule that cannot be built, read or run: the message shows the user's text or the grid, and the culprit."""
