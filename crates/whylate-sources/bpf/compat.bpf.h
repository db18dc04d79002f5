/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Every difference between kernel versions that the BPF programs have to handle, with the version that introduced it. */
#pragma once

#include <bpf/bpf_core_read.h>

/*
 * Programs at functions may be preempted where the kernel is, and from 7.0 on those at tracepoints too. They can disable
 * preemption since 6.10, and call global functions while it is disabled since 6.15, which has this lock too.
 */
struct bpf_res_spin_lock {
	u32 val;
};

extern int bpf_res_spin_lock(struct bpf_res_spin_lock *lock) __weak __ksym;
extern void bpf_preempt_disable(void) __weak __ksym;
extern void bpf_preempt_enable(void) __weak __ksym;

static __always_inline void hold_cpu(void)
{
	if (bpf_ksym_exists(bpf_res_spin_lock) && bpf_ksym_exists(bpf_preempt_disable))
		bpf_preempt_disable();
}

static __always_inline void let_cpu_go(void)
{
	if (bpf_ksym_exists(bpf_res_spin_lock) && bpf_ksym_exists(bpf_preempt_enable))
		bpf_preempt_enable();
}

/* Gives memory of the kernel a type, so that a program reads it without a call (6.2). */
extern void *bpf_rdonly_cast(const void *memory, u32 type) __weak __ksym;

static __always_inline void *as_untrusted(const void *object, u32 type)
{
	return bpf_ksym_exists(bpf_rdonly_cast) ? bpf_rdonly_cast(object, type) : (void *)object;
}

/*
 * An object of which a pointer is read after branches. If the verifier trusts the object, such as an argument of a program, it searches all
 * types of the kernel by name, up to four times, at each visit of the read (6.3 to 6.18): half of the time to load the programs. Otherwise
 * each read compares the address first, which takes 3 to 7 ns: at switches and wakeups, pointers are read before branches instead.
 */
#define untrusted(type, object) ((type *)as_untrusted((object), bpf_core_type_id_kernel(type)))

/* A 32-bit number at any kernel address; 0 if it cannot be read. */
static __always_inline u32 read_u32(u64 address)
{
	const struct refcount_struct *count;
	u32 value = 0;

	if (bpf_ksym_exists(bpf_rdonly_cast)) {
		count = bpf_rdonly_cast((const void *)address, bpf_core_type_id_kernel(struct refcount_struct));
		return count->refs.counter;
	}
	bpf_probe_read_kernel(&value, sizeof(value), (const void *)address);
	return value;
}

/* x86 has a per-CPU preemption count: in this variable from 6.2 to 6.14, otherwise in `__preempt_count`. */
struct pcpu_hot {
	int preempt_count;
} __attribute__((preserve_access_index));

/* Address of the count, from that of the variable. */
static __always_inline u64 preempt_count_in(u64 variable)
{
	return bpf_core_type_exists(struct pcpu_hot) ? variable + bpf_core_field_offset(struct pcpu_hot, preempt_count) : variable;
}

/* The run queue of the CPU on which the thread runs; 0 without CONFIG_FAIR_GROUP_SCHED. */
static __always_inline u64 run_queue_of(const struct task_struct *current)
{
	return bpf_core_field_exists(current->se.cfs_rq) ? (u64)current->se.cfs_rq->rq : 0;
}

/* Named in 6.9; before, an anonymous enum with the same bits since 5.15 (bit 1 was called DELAYED until then). */
enum work_bits {
	WORK_STRUCT_PENDING_BIT = 0,
	WORK_STRUCT_INACTIVE_BIT = 1,
	WORK_STRUCT_PWQ_BIT = 2,
	/* CONFIG_DEBUG_OBJECTS_WORK adds one, which makes the address of a pwq uncertain. */
	WORK_STRUCT_FLAG_BITS = 8,
};

/* The item is queued and its worker has not taken it yet. */
static __always_inline bool work_is_pending(const struct work_struct *work)
{
	return work->data.counter & (1 << WORK_STRUCT_PENDING_BIT);
}

/* The item waits for max_active. */
static __always_inline bool work_is_inactive(const struct work_struct *work)
{
	return work->data.counter & (1 << WORK_STRUCT_INACTIVE_BIT);
}

/* The pwq of a queued item, 0 once it is gone: from the start on, the item's worker has it. */
static __always_inline u64 pwq_of_queued(const struct work_struct *work)
{
	u64 data = work->data.counter;

	return data & (1 << WORK_STRUCT_PWQ_BIT) ? data & ~((1ull << WORK_STRUCT_FLAG_BITS) - 1) : 0;
}

/* max_active of an unbound workqueue is per node since 6.9; before, per pwq as that of other workqueues. */
struct workqueue_struct___6_9 {
	void *node_nr_active[1];
} __attribute__((preserve_access_index));

static __always_inline bool max_active_is_per_node(const struct worker_pool *pool)
{
	return bpf_core_field_exists(struct workqueue_struct___6_9, node_nr_active) && BPF_CORE_READ(pool, cpu) < 0;
}

/* PF_WQ_WORKER has been this bit since 3.7. */
enum {
	PF_WQ_WORKER = 0x20,
};

/* Only a worker in softirq context (WQ_BH, 6.9) has no task: `current` is then the interrupted one. */
enum worker_pool_flags {
	POOL_BH = 1 << 0,
};

static __always_inline bool pool_is_bh(const struct worker_pool *pool)
{
	return bpf_core_enum_value_exists(enum worker_pool_flags, POOL_BH) && (pool->flags & POOL_BH);
}

static __always_inline bool worker_is_bh(const struct worker *worker)
{
	return worker->task == NULL;
}

/* sched_info exists with CONFIG_SCHED_INFO only. */
static __always_inline u64 task_run_delay_ns(const struct task_struct *task)
{
	if (bpf_core_field_exists(task->sched_info.run_delay))
		return task->sched_info.run_delay;
	return 0;
}

/* For a thread with PF_WQ_WORKER. Every kernel with the other hooks has struct kthread in worker_private (5.17). */
static __always_inline struct worker *worker_of(const struct task_struct *task)
{
	struct kthread *kthread = task->worker_private;

	return (struct worker *)BPF_CORE_READ(kthread, data);
}

static __always_inline bool is_rescuer(const struct task_struct *task)
{
	if (!(task->flags & PF_WQ_WORKER))
		return false;
	return BPF_CORE_READ(worker_of(task), rescue_wq) != NULL;
}

/* The function of a worker's current item, or 0. */
static __always_inline u64 handler_of_worker(const struct task_struct *task)
{
	return (u64)BPF_CORE_READ(worker_of(task), current_func);
}

/* The thread that a timer of the timerlat tracer wakes; NULL without the tracer (5.14, CONFIG_TIMERLAT_TRACER). */
static __always_inline struct task_struct *task_of_tracers_timer(const struct hrtimer *timer)
{
	const struct timerlat_variables *variables;

	if (!bpf_core_type_exists(struct timerlat_variables))
		return NULL;
	variables = (const void *)timer - bpf_core_field_offset(struct timerlat_variables, timer);
	return BPF_CORE_READ(variables, kthread);
}

/* A thread of io_uring, 5.11: a submission thread or a worker. */
enum {
	PF_IO_WORKER = 0x10,
};

static __always_inline bool begins_with(const char *text, const char *prefix, u32 length)
{
	for (u32 i = 0; i < length; i++) {
		if (text[i] != prefix[i])
			return false;
	}
	return true;
}

/* Submission threads are called iou-sqp-PID, in the process of the ring, since 5.12; workers are iou-wrk-PID. */
static __always_inline bool is_sq_thread(const struct task_struct *task)
{
	char prefix[8];

	if (!(task->flags & PF_IO_WORKER))
		return false;
	bpf_core_read(prefix, sizeof(prefix), &task->comm);
	return begins_with(prefix, "iou-sqp-", sizeof(prefix));
}

/* Returns true also for a thread of io_uring that has not set its name yet. */
static __always_inline bool may_be_sq_thread(const struct task_struct *task)
{
	char prefix[8];

	if (!(task->flags & PF_IO_WORKER))
		return false;
	bpf_core_read(prefix, sizeof(prefix), &task->comm);
	return !begins_with(prefix, "iou-wrk-", sizeof(prefix));
}

/* Microseconds that the thread itself counts as work, 6.9; -1 before. */
struct io_sq_data___6_9 {
	u64 work_time;
} __attribute__((preserve_access_index));

static __always_inline s64 sq_work_time_us(const struct io_sq_data *sqd)
{
	const struct io_sq_data___6_9 *newer = (const void *)sqd;

	if (!bpf_core_field_exists(newer->work_time))
		return -1;
	return BPF_CORE_READ(newer, work_time);
}

/* Network devices that the ring polls, 6.9. */
struct io_ring_ctx___6_9 {
	struct list_head napi_list;
} __attribute__((preserve_access_index));

static __always_inline bool ring_polls_network(const struct io_ring_ctx *ctx)
{
	const struct io_ring_ctx___6_9 *newer = (const void *)ctx;

	if (!bpf_core_field_exists(newer->napi_list))
		return false;
	return BPF_CORE_READ(newer, napi_list.next) != (const void *)ctx + bpf_core_field_offset(newer->napi_list);
}

struct io_ring_ctx___7_0 {
	struct list_head iopoll_list;
} __attribute__((preserve_access_index));

/* Requests that wait to be polled for: a singly linked list up to 6.19. */
static __always_inline bool ring_has_polled_requests(const struct io_ring_ctx *ctx)
{
	const struct io_ring_ctx___7_0 *newer = (const void *)ctx;

	if (bpf_core_field_exists(ctx->iopoll_list.first))
		return BPF_CORE_READ(ctx, iopoll_list.first) != NULL;
	if (!bpf_core_field_exists(newer->iopoll_list.next))
		return false;
	return BPF_CORE_READ(newer, iopoll_list.next) != (const void *)ctx + bpf_core_field_offset(newer->iopoll_list);
}

/* Time from a scheduler timestamp until its CPU's run queue clock was last updated, a tick ago at most; 0 without one. */
static __always_inline u64 since_stamp_ns(const struct task_struct *task, u64 since)
{
	u64 now;

	/* cfs_rq exists with CONFIG_FAIR_GROUP_SCHED. */
	if (!bpf_core_field_exists(task->se.cfs_rq))
		return 0;
	now = since ? untrusted(struct task_struct, task)->se.cfs_rq->rq->clock : 0;
	return since && now > since ? now - since : 0;
}

/* Run-queue wait of a runnable thread so far; 0 if it is not waiting. */
static __always_inline u64 task_waiting_ns(const struct task_struct *task)
{
	return bpf_core_field_exists(task->sched_info.last_queued) ? since_stamp_ns(task, task->sched_info.last_queued) : 0;
}

/* Time since the switch-in of a running thread; 0 if the kernel does not record it. */
static __always_inline u64 task_ran_ns(const struct task_struct *task)
{
	return bpf_core_field_exists(task->sched_info.last_arrival) ? since_stamp_ns(task, task->sched_info.last_arrival) : 0;
}

/* The CFS run queue of the thread; NULL without CONFIG_FAIR_GROUP_SCHED. */
static __always_inline const struct cfs_rq *cfs_queue_of(const struct task_struct *task)
{
	return bpf_core_field_exists(task->se.cfs_rq) ? task->se.cfs_rq : NULL;
}

/* Time since the thread last ran, by the clock of its run queue, which was read before; the maximum if unknown. */
static __always_inline u64 off_cpu_ns_by(const struct cfs_rq *queue, const struct task_struct *task)
{
	u64 since_ns, now_ns;

	if (!bpf_core_field_exists(task->sched_info.last_arrival) || !bpf_core_field_exists(task->se.cfs_rq))
		return ~0ULL >> 1;
	since_ns = task->sched_info.last_arrival;
	now_ns = queue->rq->clock;
	return now_ns > since_ns ? now_ns - since_ns : 0;
}

static __always_inline u64 task_off_cpu_ns(const struct task_struct *task)
{
	return off_cpu_ns_by(cfs_queue_of(untrusted(struct task_struct, task)), task);
}

enum {
	/* The thread is being woken, and is not queued yet (include/linux/sched.h). */
	TASK_WAKING = 0x200,
};

/* Since 6.18 a throttled cgroup's threads are dequeued as they return to user space; before, their cfs_rq was. */
struct task_struct___6_18 {
	bool throttled;
} __attribute__((preserve_access_index));

/* Up to 6.17, with CONFIG_CFS_BANDWIDTH: all threads in a throttled cfs_rq wait with it. */
static __always_inline bool queues_are_throttled(void)
{
	return !bpf_core_field_exists(struct task_struct___6_18, throttled) && bpf_core_field_exists(struct cfs_rq, throttle_count) &&
	       bpf_core_field_exists(struct sched_entity, cfs_rq);
}

/* A real-time thread of the classes FIFO and RR (include/linux/sched/prio.h). */
static __always_inline bool is_real_time(const struct task_struct *task)
{
	return task->prio >= 0 && task->prio < 100;
}

/* Quotas apply to the fair class: a thread that left it while it was throttled keeps the flag (6.18). */
static __always_inline bool may_be_throttled(const struct task_struct *task)
{
	return task->prio >= 100;
}

static __always_inline bool is_throttled(const struct task_struct *task)
{
	const struct task_struct___6_18 *newer = (const void *)task;

	if (!may_be_throttled(task))
		return false;
	if (bpf_core_field_exists(newer->throttled))
		return newer->throttled;
	return queues_are_throttled() && task->se.cfs_rq->throttle_count > 0;
}

/*
 * Whether a thread that is woken on this CPU is throttled when it is enqueued: its cfs_rq is throttled already, or neither
 * the cfs_rq nor its group has runtime left.
 */
static __always_inline bool finds_quota_used_up(const struct task_struct *task, u32 cpu)
{
	struct task_group *group;
	struct cfs_rq *queue;

	if (!queues_are_throttled() || !may_be_throttled(task))
		return false;
	queue = task->se.cfs_rq;
	/* Nearly always. */
	if (!queue->runtime_enabled && !queue->throttle_count)
		return false;
	group = BPF_CORE_READ(task, se.cfs_rq, tg);
	if (bpf_probe_read_kernel(&queue, sizeof(queue), BPF_CORE_READ(group, cfs_rq) + cpu))
		return false;
	if (BPF_CORE_READ(queue, throttle_count))
		return true;
	return BPF_CORE_READ(queue, runtime_enabled) && BPF_CORE_READ(queue, runtime_remaining) <= 0 &&
	       !BPF_CORE_READ(group, cfs_bandwidth.runtime);
}

static __always_inline bool is_deadline(const struct task_struct *task)
{
	return task->prio < 0;
}

/* When the exhausted budget of a deadline thread was last replenished, or will be; on CLOCK_MONOTONIC. */
static __always_inline u64 deadline_refilled_ns(const struct task_struct *task)
{
	return is_deadline(task) ? task->dl.dl_timer.node.expires : 0;
}

enum {
	/* The kernel's value for "no quota" (kernel/sched/sched.h). */
	RUNTIME_INF = -1,
	GROUP_LEVELS = 16,
};

/* Whether real-time throttling keeps it off the CPU: one limit for all up to 6.11, or one per cgroup. */
static __always_inline bool is_real_time_throttled(const struct task_struct *task)
{
	const struct sched_rt_entity *entity = &task->rt;

	if (!is_real_time(task) || !bpf_core_field_exists(struct rt_rq, rt_throttled))
		return false;
	/* With CONFIG_RT_GROUP_SCHED. */
	if (bpf_core_field_exists(entity->rt_rq)) {
		for (u32 level = 0; level < GROUP_LEVELS && entity; level++) {
			if (BPF_CORE_READ(entity, rt_rq, rt_throttled))
				return true;
			entity = BPF_CORE_READ(entity, parent);
		}
		return false;
	}
	return bpf_core_field_exists(task->se.cfs_rq) && BPF_CORE_READ(task, se.cfs_rq, rq, rt.rt_throttled);
}

/* A thread scheduled by a BPF scheduler, 6.12 (CONFIG_SCHED_CLASS_EXT). */
struct sched_ext_entity {
	u32 flags;
} __attribute__((preserve_access_index));

struct task_struct___6_12_ext {
	struct sched_ext_entity scx;
} __attribute__((preserve_access_index));

enum {
	/* It is queued in that class (include/linux/sched/ext.h). */
	SCX_TASK_QUEUED = 1 << 0,
};

static __always_inline bool is_of_sched_ext(const struct task_struct *task)
{
	const struct task_struct___6_12_ext *newer = (const void *)task;

	return bpf_core_field_exists(newer->scx) && BPF_CORE_READ(newer, scx.flags) & SCX_TASK_QUEUED;
}

/* Only threads with equal cookies share a core: a CPU may have to idle (5.14, CONFIG_SCHED_CORE). */
static __always_inline bool has_core_scheduling(const struct task_struct *task)
{
	return bpf_core_field_exists(struct rq, core_enabled) && bpf_core_field_exists(task->se.cfs_rq) &&
	       BPF_CORE_READ(task, se.cfs_rq, rq, core_enabled);
}

/* The ID of a cgroup by its struct task_group; 0 for an autogroup. */
static __always_inline u64 cgroup_of_group(const struct task_group *group)
{
	return BPF_CORE_READ(group, css.cgroup, kn, id);
}

/* When the quota of a group was first refilled after `since_ns`, which ends throttling; a timer does so each period. */
static __always_inline u64 quota_filled_ns(const struct task_group *group, u64 since_ns)
{
	u64 due_ns = BPF_CORE_READ(group, cfs_bandwidth.period_timer.node.expires);
	u64 period_ns = BPF_CORE_READ(group, cfs_bandwidth.period);

	return period_ns && due_ns > since_ns ? due_ns - (due_ns - since_ns - 1) / period_ns * period_ns : 0;
}

static __always_inline bool has_quota(const struct task_group *group)
{
	return BPF_CORE_READ(group, cfs_bandwidth.quota) != (u64)RUNTIME_INF;
}

/* The innermost cgroup of the thread that may have a CPU quota; NULL if none can. */
static __always_inline const struct task_group *group_for_quota_of(const struct task_struct *task)
{
	if (!bpf_core_field_exists(struct cfs_rq, tg) || !bpf_core_field_exists(struct task_group, cfs_bandwidth.quota))
		return NULL;
	return BPF_CORE_READ(task, se.cfs_rq, tg);
}

/* The group with the exhausted quota on this CPU, if the thread's cfs_rq is throttled. */
static __always_inline struct task_group *throttled_group_of(const struct task_struct *task, u32 cpu)
{
	struct task_group *group = BPF_CORE_READ(task, se.cfs_rq, tg), *throttled = NULL;
	struct cfs_rq *queue;

	/* throttle_count includes throttled ancestors: the topmost group with a nonzero count has none above. */
	for (u32 level = 0; level < GROUP_LEVELS && group; level++) {
		if (bpf_probe_read_kernel(&queue, sizeof(queue), BPF_CORE_READ(group, cfs_rq) + cpu) ||
		    !BPF_CORE_READ(queue, throttle_count))
			break;
		throttled = group;
		group = BPF_CORE_READ(group, parent);
	}
	return throttled;
}

/* The nearest cgroup with a CPU quota from this one upwards, itself included; NULL for none (CONFIG_CFS_BANDWIDTH). */
static __always_inline struct task_group *group_with_quota(struct task_group *group)
{
	if (!bpf_core_field_exists(struct task_group, cfs_bandwidth.quota))
		return NULL;
	for (u32 level = 0; level < GROUP_LEVELS && group; level++) {
		if (has_quota(group))
			return group;
		group = BPF_CORE_READ(group, parent);
	}
	return NULL;
}

/* The cgroup that determines the thread's share of CPU time; NULL without CONFIG_FAIR_GROUP_SCHED. */
static __always_inline struct task_group *group_of(const struct task_struct *task)
{
	return bpf_core_field_exists(struct cfs_rq, tg) ? BPF_CORE_READ(task, se.cfs_rq, tg) : NULL;
}

/*
 * The lock on which a thread blocks, with CONFIG_DETECT_HUNG_TASK_BLOCKER: only mutexes in 6.15, semaphores and the kind
 * of the lock since 6.16, rwsems since 6.17.
 */
struct task_struct___6_15 {
	struct mutex *blocker_mutex;
} __attribute__((preserve_access_index));

struct task_struct___6_16 {
	unsigned long blocker;
} __attribute__((preserve_access_index));

/* Only mutexes, including interruptible waits, on every kernel since 6.17; before, with DEBUG_MUTEXES, something else. */
struct task_struct___6_17 {
	struct mutex *blocked_on;
} __attribute__((preserve_access_index));

/* With the same option as `blocker`. */
struct semaphore___6_16 {
	unsigned long last_holder;
} __attribute__((preserve_access_index));

/* The lower bits of `blocker` (include/linux/hung_task.h). */
enum blocker_kind {
	BLOCKER_MUTEX,
	BLOCKER_SEMAPHORE,
	BLOCKER_RWSEM_READER,
	BLOCKER_RWSEM_WRITER,
	BLOCKER_KINDS = 3,
};

/* The lock on which a blocked thread waits, with its kind; 0 if the kernel does not record it. */
static __always_inline u64 blocker_of(const struct task_struct *task, bool has_mutex_in_blocked_on)
{
	const struct task_struct___6_15 *first = (const void *)task;
	const struct task_struct___6_16 *second = (const void *)task;
	const struct task_struct___6_17 *third = (const void *)task;
	u64 blocker = 0;

	if (bpf_core_field_exists(second->blocker))
		blocker = second->blocker;
	else if (bpf_core_field_exists(first->blocker_mutex))
		blocker = (u64)BPF_CORE_READ(first, blocker_mutex);
	if (!blocker && has_mutex_in_blocked_on && bpf_core_field_exists(third->blocked_on))
		blocker = (u64)BPF_CORE_READ(third, blocked_on);
	return blocker;
}

/* The thread that last acquired the semaphore; 0 if the kernel does not record it. */
static __always_inline u64 last_holder_of(u64 semaphore)
{
	const struct semaphore___6_16 *newer = (const void *)semaphore;

	return bpf_core_field_exists(newer->last_holder) ? BPF_CORE_READ(newer, last_holder) : 0;
}
