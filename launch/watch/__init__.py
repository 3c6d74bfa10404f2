"""The state of a cluster, as `status`, `top`, `doctor` and `/ui` show it: `asker` asks the nodes, `figures`
reads their metrics, and `state` makes one picture of them."""
