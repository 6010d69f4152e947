#!/bin/sh
# Make the images of the tests, unless they exist, without an image registry:
# localhost/agent-loop-busybox (a static busybox) and localhost/agent-loop-base (Debian with python3, git and bash).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

if ! podman image exists localhost/agent-loop-busybox; then
    mkdir -p "$folder/busybox/bin" "$folder/busybox/tmp" "$folder/busybox/root" "$folder/busybox/etc" "$folder/busybox/usr"
    cp "$(command -v busybox || echo /bin/busybox)" "$folder/busybox/bin/busybox"
    for name in $("$folder/busybox/bin/busybox" --list); do
        [ "$name" = busybox ] || ln -s busybox "$folder/busybox/bin/$name"
    done
    ln -s ../bin "$folder/busybox/usr/bin"
    chmod 1777 "$folder/busybox/tmp"
    printf 'root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000::/tmp:/bin/sh\n' >"$folder/busybox/etc/passwd"
    tar -C "$folder/busybox" -cf - . | podman import - localhost/agent-loop-busybox
fi

if ! podman image exists localhost/agent-loop-base; then
    suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
    debootstrap --variant=minbase --include=python3,git,bash,ca-certificates "$suite" "$folder/base" ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"}
    rm -rf "$folder/base/var/cache/apt/archives/"*.deb "$folder/base/var/lib/apt/lists/"*
    tar -C "$folder/base" --one-file-system -cf - . | podman import - localhost/agent-loop-base
fi
