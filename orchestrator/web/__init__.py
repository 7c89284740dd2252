"""The page: what a browser shows of jobs, GPUs and nodes, and the actions on them.

It owns HTML, its assets, sign-in by a one-time link, and the stream that keeps open pages current. It asks `api.service`
alone, and decides nothing: what a user may do is what the API lets the same user do. Nothing is rendered while no browser
looks, and all browsers that look at one thing share one rendering. Begin with `app.py`.
"""
