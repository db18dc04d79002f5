# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Has two probes that do nothing at each tracepoint that whylate uses. The kernel then changes none of its code when another one comes or
# goes (kernel/tracepoint.c), which emulated CPUs may miss. For what follows in the same shell of a virtual machine.
for instance in first second; do
    mkdir "/sys/kernel/tracing/instances/$instance"
    echo 0 >"/sys/kernel/tracing/instances/$instance/tracing_on"
    for events in workqueue irq_vectors irq nmi/nmi_handler timer/hrtimer_expire_entry timer/hrtimer_expire_exit \
        sched/sched_switch sched/sched_waking sched/sched_migrate_task io_uring/io_uring_task_work_run io_uring/io_uring_submit_req; do
        # Not every kernel has each of them.
        [ ! -e "/sys/kernel/tracing/instances/$instance/events/$events" ] ||
            echo 1 >"/sys/kernel/tracing/instances/$instance/events/$events/enable"
    done
done
