"""Web page that shows jobs, GPUs and nodes in a browser, with actions on them.

It owns HTML, its assets, sign-in by a one-time link, and the stream that keeps open pages current. It uses
`api.service` alone, and decides nothing: a user may do what the API lets the same user do. Nothing is rendered without
an open browser, and all browsers on one view share one rendering. Begin with `app.py`.
"""
