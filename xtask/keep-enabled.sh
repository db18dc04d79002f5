# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Keeps two no-op probes at each tracepoint that whylate uses. The kernel then does not patch its code when another
# probe comes or goes (kernel/tracepoint.c), which emulated CPUs may miss. Sourced by the script of a virtual machine.
for instance in first second; do
    mkdir "/sys/kernel/tracing/instances/$instance"
    echo 0 >"/sys/kernel/tracing/instances/$instance/tracing_on"
    for events in workqueue irq_vectors irq ipi/ipi_entry ipi/ipi_exit nmi/nmi_handler timer/hrtimer_expire_entry timer/hrtimer_expire_exit \
        sched/sched_switch sched/sched_waking sched/sched_migrate_task sched/sched_wakeup_new sched/sched_process_exec \
        sched/sched_process_exit task/task_newtask block/block_bio_queue block/block_split block/block_bio_backmerge \
        block/block_bio_frontmerge block/block_bio_complete block/block_io_start block/block_getrq block/block_rq_insert \
        block/block_rq_issue block/block_rq_requeue block/block_rq_merge block/block_rq_complete \
        io_uring/io_uring_task_work_run io_uring/io_uring_submit_req; do
        # Not every kernel has each of them.
        [ ! -e "/sys/kernel/tracing/instances/$instance/events/$events" ] ||
            echo 1 >"/sys/kernel/tracing/instances/$instance/events/$events/enable"
    done
done
