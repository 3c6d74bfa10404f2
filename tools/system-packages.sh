#!/usr/bin/env bash
# Installs the packages of the system that are missing, where it may: as root, or with a sudo that asks for no password.
#   bash tools/system-packages.sh run     what pd-cache itself needs; an error where it is missing and may not be installed
#   bash tools/system-packages.sh test    that, and what its tests need; those that lack something are skipped
#   bash tools/system-packages.sh ci      all of that, and what a bare machine lacks to begin with
set -euo pipefail

library() { ldconfig -p | grep -q "$1"; }
programs() { command -v "$@" >/dev/null; }

missing() {
    # Mooncake's wheel links to these, those of RDMA too; to libmlx5 from 0.3.14 on
    library 'libibverbs\.so\.1' || echo libibverbs1
    library 'libmlx5\.so\.1' || echo ibverbs-providers
    library 'libnuma\.so\.1' || echo libnuma1
    library 'libcurl\.so\.4' || echo libcurl4
    [ "$1" = run ] && return
    programs etcd || echo etcd-server
    { programs ip && programs tc; } || echo iproute2
    programs openssl || echo openssl
    programs chromium || programs chromium-browser || programs google-chrome || echo chromium
    programs nginx || [ -x /usr/sbin/nginx ] || echo nginx-light
    [ "$1" = test ] && return
    programs make || echo make
    { programs cc && programs nm; } || echo gcc
    "${PYTHON:-python3}" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
}

for_what=${1:-run}
mapfile -t packages < <(missing "$for_what")
[ ${#packages[@]} = 0 ] && exit 0
mapfile -t needed < <(missing run | grep -v ibverbs-providers)  # Mooncake 0.3.13 loads without libmlx5

if ! command -v apt-get >/dev/null; then
    echo "missing: ${packages[*]} (names of Debian and Ubuntu); install your distribution's, RDMA's libibverbs is of rdma-core" >&2
elif [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; then
    sudo=()
    [ "$(id -u)" = 0 ] || sudo=(sudo)
    export DEBIAN_FRONTEND=noninteractive
    if "${sudo[@]}" apt-get update -qq && "${sudo[@]}" apt-get install -y -qq --no-install-recommends "${packages[@]}"; then
        exit 0
    fi
    echo "missing, and apt-get did not install: ${packages[*]}" >&2
else
    echo "missing: ${packages[*]}. To install them:" >&2
    echo "    sudo apt-get update && sudo apt-get install -y ${packages[*]}" >&2
fi
[ ${#needed[@]} = 0 ]  # Mooncake cannot be loaded without these
