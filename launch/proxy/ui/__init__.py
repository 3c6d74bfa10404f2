"""`/ui`: the cluster as a page in a browser, which follows by server-sent events and loads nothing from elsewhere.

`recent.py` (pure) keeps the last hour's requests, `node_watch.py` asks the nodes for their metrics while somebody follows, `pages.py` serves the
page and its events, and `page.html`, `page.css` and `page.js` are the page.
"""

from launch.proxy.ui.node_watch import NodeWatch
from launch.proxy.ui.pages import UiPages
from launch.proxy.ui.recent import RecentRequests

__all__ = ["NodeWatch", "RecentRequests", "UiPages"]
