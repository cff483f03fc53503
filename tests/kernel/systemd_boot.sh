#!/bin/sh
# systemd_boot.sh UNIT...: what `unshare --mount --pid --fork --cgroup` runs to become a systemd that starts the units of
# deploy/systemd as an operator has installed them. Its cgroup is the top of a group of its own; /run and /var/lib are
# fresh; agentrt is at /opt/agentrt, a virtual environment around this checkout. For a machine that is thrown away.
# From the environment: BASE the interpreter's prefix, VERSION as 3.11, LIBRARIES its packages, SOURCE the checkout.
set -eu
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs -o mode=755 run /run
mount -t tmpfs -o mode=755 lib /var/lib
mount -t tmpfs -o mode=755 cache /var/cache
umount /sys/fs/cgroup
mount -t cgroup2 -o nsdelegate cgroup2 /sys/fs/cgroup

home=/opt/agentrt
mkdir -p $home/base $home/source $home/libraries $home/bin "$home/lib/python$VERSION/site-packages"
mount --bind "$BASE" $home/base
mount --bind "$SOURCE" $home/source
mount --bind "$LIBRARIES" $home/libraries
printf 'home = %s/base/bin\n' $home >$home/pyvenv.cfg
ln -sf "$home/base/bin/python$VERSION" $home/bin/python
printf '%s\n' $home/source $home/libraries >"$home/lib/python$VERSION/site-packages/agentrt.pth"
printf '#!%s/bin/python\nfrom agentrt.cli.main import main\nmain()\n' $home >$home/bin/agentrt
chmod 755 $home/bin/agentrt
# Where the interpreter looks for its own library may be where only root gets.
echo $home/base/lib >/etc/ld.so.conf.d/000-agentrt.conf
ldconfig
grep -q '^agentrt:' /etc/passwd || echo 'agentrt:x:990:990::/var/lib/agentrt:/usr/sbin/nologin' >>/etc/passwd
grep -q '^agentrt:' /etc/group || echo 'agentrt:x:990:' >>/etc/group
mkdir -p /etc/agentrt
: >/etc/agentrt/node.toml

units=/run/systemd/system
mkdir -p $units
cp "$SOURCE"/deploy/systemd/*.service $units
for unit in "$@"; do
    mkdir -p "$units/$unit.d"
    # No journal and no devices are waited for here.
    printf '[Unit]\nDefaultDependencies=no\nWants=\nAfter=\n[Service]\nStandardOutput=append:/run/log-%s\n' "$unit" \
        >"$units/$unit.d/test.conf"
    printf 'StandardError=inherit\n' >>"$units/$unit.d/test.conf"
done
printf '[Unit]\nDefaultDependencies=no\n' >$units/test.target
# Who made the namespaces is not in them, and must have left the group, which is to be divided.
while grep -qx 0 /sys/fs/cgroup/cgroup.procs; do sleep 0.1; done
exec env -i container=test PATH="$PATH" /lib/systemd/systemd --system --unit=test.target --log-target=console \
    --show-status=no
