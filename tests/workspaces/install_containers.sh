#!/bin/sh
# Install podman without a daemon on Debian, set it up for machines without systemd, and make the images of the tests.
#
# Usage: sudo tests/workspaces/install_containers.sh
set -eu
here=$(cd "$(dirname "$0")" && pwd)

packages=""
command -v podman >/dev/null || packages="$packages podman"
command -v runc >/dev/null || packages="$packages runc"
command -v debootstrap >/dev/null || packages="$packages debootstrap"
[ -x /bin/busybox ] || [ -x /usr/bin/busybox ] || packages="$packages busybox-static"
if [ -n "$packages" ]; then
    apt-get update -q
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $packages
fi

# crun fails where cgroups of both versions are mounted; raising ulimits needs rights that a test machine may lack.
mkdir -p /etc/containers/containers.conf.d
cat >/etc/containers/containers.conf.d/50-agent-loop-tests.conf <<'CONF'
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
netns = "host"

[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
CONF

"$here/make_image.sh"
