#!/bin/busybox sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# The first process of the virtual machine: runs the command, and prints its status after a mark.

export PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin:/busybox
export HOME=/root TMPDIR=/tmp LANG=C.UTF-8
/bin/busybox mount -t proc proc /proc
/bin/busybox --install -s /busybox
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm /tmp
mount -t devpts -o ptmxmode=666 devpts /dev/pts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
# Not a mount, which would hide what the archive has there.
chmod 1777 /tmp /var/tmp
mount -t tracefs tracefs /sys/kernel/tracing
mount -t debugfs debugfs /sys/kernel/debug
mount -t bpf bpf /sys/fs/bpf
mount -t cgroup2 cgroup2 /sys/fs/cgroup
# For CPU quotas of threads.
echo +cpu >/sys/fs/cgroup/cgroup.subtree_control
ln -s /proc/self/fd /dev/fd
ln -s /proc/self/fd/1 /dev/stdout
ln -s /proc/self/fd/2 /dev/stderr
hostname whylate-vm
ip link set lo up

# This line is reserved for the command: the kernel's console is another one.
if ! exec 3>/dev/@LINE@ || ! stty -F /dev/@LINE@ raw -echo; then
    echo 'init: the line @LINE@ cannot be used'
    poweroff -f
fi
cd /root
# `env` runs a program where the shell would run its builtin.
env -- @COMMAND@ </dev/null >&3 2>&3 3>&-
printf '%s%d\n' '@MARK@' $? >&3
# The host switches the machine off; a kernel without that line has to do so itself.
sleep 60
poweroff -f
