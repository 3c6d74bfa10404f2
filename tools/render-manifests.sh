#!/usr/bin/env bash
# Makes deploy/kubernetes from the chart, and gives the chart its copy of the alert rules. Needs helm.
#   make manifests      or: bash tools/render-manifests.sh [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${1:-deploy/kubernetes}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# into a copy, so that a test that compares changes nothing
cp -r deploy/helm/pd-cache "$work/chart"
cp deploy/prometheus/rules.yml "$work/chart/files/rules.yml"
[ $# -gt 0 ] || cp deploy/prometheus/rules.yml deploy/helm/pd-cache/files/rules.yml
helm template pd-cache "$work/chart" --namespace pd-cache --values deploy/helm/plain-values.yaml --output-dir "$work/out" >/dev/null

mkdir -p "$folder"
rm -f "$folder"/*.yaml
for file in "$work"/out/pd-cache/templates/*.yaml; do
    {
        echo "# Made from the chart by \`make manifests\`. Change deploy/helm, not this file."
        grep -vE '^# Source: |app.kubernetes.io/managed-by: Helm|helm.sh/chart: ' "$file"
    } >"$folder/$(basename "$file")"
done
