#!/bin/busybox sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# The first process of the virtual machine: runs the command and tells its status, after a mark.

export PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin:/busybox
export HOME=/root TMPDIR=/tmp LANG=C.UTF-8
/bin/busybox mount -t proc proc /proc
/bin/busybox --install -s /busybox
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm /tmp
mount -t devpts -o ptmxmode=666 devpts /dev/pts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
# No mount: what was put there has to stay in sight.
chmod 1777 /tmp /var/tmp
mount -t tracefs tracefs /sys/kernel/tracing
mount -t debugfs debugfs /sys/kernel/debug
mount -t bpf bpf /sys/fs/bpf
mount -t cgroup2 cgroup2 /sys/fs/cgroup
# Threads may have quotas of CPU time then.
echo +cpu >/sys/fs/cgroup/cgroup.subtree_control
ln -s /proc/self/fd /dev/fd
ln -s /proc/self/fd/1 /dev/stdout
ln -s /proc/self/fd/2 /dev/stderr
hostname whylate-vm
ip link set lo up

# This line is the command's alone: another one is the kernel's console.
if ! exec 3>/dev/@LINE@ || ! stty -F /dev/@LINE@ raw -echo; then
    echo 'init: the line @LINE@ cannot be used'
    poweroff -f
fi
cd /root
# `env` starts what the command names, where the shell would take a builtin of its own.
env -- @COMMAND@ </dev/null >&3 2>&3 3>&-
printf '%s%d\n' '@MARK@' $? >&3
# The machine is switched off from outside; a kernel without that line has nobody to do so.
sleep 60
poweroff -f
