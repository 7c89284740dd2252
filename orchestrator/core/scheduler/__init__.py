"""The scheduler: ``decide(state, now) -> commands``, placement and elastic sizes. Pure.

Begin with ``scheduler.py``. ``order.py`` is the order of waiting jobs, with ``service/`` for what they are expected to need; ``room/`` is what is
free, ``rounds/`` one round of placing and who stops for whom, ``conditions/`` what jobs wait for beside room.
"""
