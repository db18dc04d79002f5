/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Running work items, by worker: the item itself may be freed while it runs. */
#pragma once

enum {
	RUNNING_SET_BITS = 10,
	RUNNING_SETS = 1 << RUNNING_SET_BITS,
};

struct running_item {
	u64 item;
	u64 started_ns;
	/* When the scheduler last accounted the worker, on sched_clock(): user space's CLOCK_MONOTONIC but for a constant. */
	u64 accounted_ns;
	/* CPU time of the worker up to then. */
	u64 cpu_time_ns;
	u64 switches;
	u64 run_delay_ns;
	u32 series;
} __attribute__((aligned(64)));

/*
 * A worker runs one item at a time, and only the worker writes its entry, which it keeps between two items: then `item` is
 * 0, and only if the set is full another worker may take the entry. Workers of BH workqueues have no task: their key is
 * the CPU number plus one, which no kernel address equals; softirqs do not nest on a CPU.
 */
struct running_set {
	u64 workers_by_way[WAYS];
	struct running_item items[WAYS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, RUNNING_SETS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, struct running_set);
} running_items SEC(".maps");

static __always_inline struct running_set *running_set_of(u64 worker)
{
	u32 index = hash_of(low_half(worker), RUNNING_SET_BITS);

	return bpf_map_lookup_elem(&running_items, &index);
}

/*
 * When the scheduler last accounted the task, on sched_clock(). exec_start is on the run queue's task clock, which stops
 * in interrupts and while the vCPU is descheduled, and so drifts between CPUs; without CONFIG_FAIR_GROUP_SCHED the run
 * queue cannot be reached from the task, and that time counts as on-CPU time.
 */
static __always_inline u64 accounted_ns(const struct task_struct *task)
{
	const struct rq *rq;

	if (!bpf_core_field_exists(task->se.cfs_rq))
		return task->se.exec_start;
	rq = untrusted(struct task_struct, task)->se.cfs_rq->rq;
	return task->se.exec_start + (rq->clock - rq->clock_task);
}

static __always_inline u64 switches_of(const struct task_struct *task)
{
	return task->nvcsw + task->nivcsw;
}

static __always_inline u64 bh_worker(void)
{
	return (u64)bpf_get_smp_processor_id() + 1;
}

/* Takes an entry of a full set, of a worker that has no item or has exited. */
static __noinline u32 evict_way(struct running_set *set, u64 worker)
{
#pragma unroll
	for (u32 way = 0; way < WAYS; way++) {
		u64 other = set->workers_by_way[way];

		if (!set->items[way].item && __sync_val_compare_and_swap(&set->workers_by_way[way], other, worker) == other)
			return way;
	}
	return WAYS;
}

static __always_inline void item_runs(u64 worker, u64 item, u32 series, u64 now_ns)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct running_set *set = running_set_of(worker);
	struct running_item *running;
	u32 way;

	if (!set)
		return;
	way = way_of(set->workers_by_way, worker);
	if (way == WAYS)
		way = claim_way(set->workers_by_way, worker);
	if (way == WAYS)
		way = evict_way(set, worker);
	if (way >= WAYS) {
		lose(LOST_RUNNING_FULL);
		return;
	}
	running = &set->items[way];
	running->item = item;
	running->started_ns = now_ns;
	running->accounted_ns = accounted_ns(task);
	running->cpu_time_ns = task->se.sum_exec_runtime;
	running->switches = switches_of(task);
	running->run_delay_ns = task_run_delay_ns(task);
	running->series = series;
}

/* Entry of a worker that runs an item, or NULL. */
static __always_inline struct running_item *running_item_of(u64 worker)
{
	struct running_set *set = running_set_of(worker);
	u32 way;

	if (!set)
		return NULL;
	way = way_of(set->workers_by_way, worker);
	if (way >= WAYS || !set->items[way].item)
		return NULL;
	return &set->items[way];
}

/* The parts of a run time; they add up. */
struct run {
	u64 runtime_ns;
	u64 on_cpu_ns;
	u64 blocked_ns;
	/* Run-queue wait. */
	u64 ready_ns;
};

/*
 * The run of a worker that was switched out. The scheduler accounts a task at switches and ticks; in between, its CPU
 * time grows with the clock. So the worker was off-CPU for as long as the accounting timestamp grew beyond its CPU time.
 */
static __always_inline struct run run_of(const struct running_item *running, const struct task_struct *task)
{
	struct run run = { .runtime_ns = since(bpf_ktime_get_ns(), running->started_ns) };
	s64 off_cpu_ns = accounted_ns(task) - running->accounted_ns;

	off_cpu_ns -= task->se.sum_exec_runtime - running->cpu_time_ns;
	/* Clocks of two CPUs may differ slightly. */
	if (off_cpu_ns < 0)
		off_cpu_ns = 0;
	if ((u64)off_cpu_ns > run.runtime_ns)
		off_cpu_ns = run.runtime_ns;
	run.ready_ns = task_run_delay_ns(task) - running->run_delay_ns;
	if (run.ready_ns > (u64)off_cpu_ns)
		run.ready_ns = off_cpu_ns;
	run.blocked_ns = off_cpu_ns - run.ready_ns;
	run.on_cpu_ns = run.runtime_ns - off_cpu_ns;
	return run;
}
