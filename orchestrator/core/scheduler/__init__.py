"""The scheduler: ``decide(state, now) -> commands``, placement and elastic sizes. Pure.

Begin with ``scheduler.py``. ``order.py`` has the order of waiting jobs, and ``service/`` the time that they are
expected to need; ``room/`` has the free resources of the nodes, ``rounds/`` one round of placing and the jobs that stop
for others, and ``conditions/`` what jobs wait for besides free resources.
"""
