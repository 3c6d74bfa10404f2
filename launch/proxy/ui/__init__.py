"""`/ui`: the cluster as a page in a browser, which follows by server-sent events and loads nothing from
elsewhere.

`recent.py` (pure) keeps the last hour's requests. `pages.py` serves the page and its events; while a browser
follows, it asks the nodes (`launch/watch/asker.py`). `page.html`, `page.css` and `page.js` are the page.
"""

from launch.proxy.ui.pages import UiPages
from launch.proxy.ui.recent import EndedRequest, RecentRequests

__all__ = ["EndedRequest", "RecentRequests", "UiPages"]
