"""`/ui`: the cluster as a page in a browser, which follows by server-sent events and loads nothing from
elsewhere.

`recent.py` (pure) keeps the last hour's requests, `pages.py` serves the page and its events, for which it
asks the nodes while a browser follows (`launch/watch/asker.py`), and `page.html`, `page.css` and
`page.js` are the page.
"""

from launch.proxy.ui.pages import UiPages
from launch.proxy.ui.recent import EndedRequest, RecentRequests

__all__ = ["EndedRequest", "RecentRequests", "UiPages"]
