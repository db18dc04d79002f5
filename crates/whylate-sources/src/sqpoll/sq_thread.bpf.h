/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Time accounting of each submission thread. Only the CPU on which the thread runs or is switched out changes its record. */
#pragma once

enum sq_limits {
	SQ_THREADS = 4096,
	/* Maximum number of distinguished competitors. */
	COMPETITORS = 8,
	/* More than the scheduler's clock and CLOCK_MONOTONIC differ at one instant. */
	CLOCKS_APART_NS = 1000000,
};

enum {
	/* include/uapi/asm-generic/unistd.h; x86-64 and arm64 have the same number. */
	IO_URING_ENTER = 426,
	/* include/linux/sched.h */
	PF_KTHREAD = 0x200000,
	TASK_INTERRUPTIBLE = 1,
	/* include/uapi/linux/io_uring.h */
	IORING_ENTER_SQ_WAKEUP = 1 << 1,
};

/* Events that could not be counted, by reason. */
enum sq_lost {
	/* No room for a thread. */
	SQ_LOST_THREADS,
	/* No room for a late event: the reader is too slow. */
	SQ_LOST_LATE_EVENTS,
	/* A stack that the kernel could not walk. */
	SQ_LOST_SAMPLES,
	/* An unseen end of work, which counts as longer until other work starts. */
	SQ_LOST_EXITS,
	/* A long wait without a recorded start. */
	SQ_LOST_WAKEUPS,
	SQ_LOST_REASONS,
};

/* include/uapi/linux/io_uring.h */
enum uring_setup {
	IORING_SETUP_IOPOLL = 1 << 0,
	IORING_SETUP_SQPOLL = 1 << 1,
	IORING_SETUP_ATTACH_WQ = 1 << 5,
};

/* A thread that ran until the submission thread was switched in, and the total time of those waits. */
struct competitor {
	u64 waited_ns;
	u32 tid;
	/* In the reader's PID namespace. */
	u32 shown_tid;
	char name[16];
};

struct sq_thread {
	/* Odd while the record changes. */
	u32 version;
	u32 tid;
	/* In the reader's PID namespace; 0: outside of it. */
	u32 own_tid;
	u32 own_tgid;
	/* Creation time; identifies the thread together with the TID. */
	u64 born_ns;
	/* Start of the time that this record covers, and its end, once the thread has exited. */
	u64 known_since_ns;
	u64 ended_ns;
	/* Time of the thread's last switch or event. */
	u64 since_ns;
	/* Earlier on-CPU time of the current round. */
	u64 round_ns;
	u64 working_ns;
	u64 spinning_ns;
	/* Run delay when the record started, and when the thread exited. */
	u64 first_run_delay_ns;
	u64 last_run_delay_ns;
	/* Start of the last wait for a CPU that was seen; 0: none since it last ran. */
	u64 waits_since_ns;
	/* Run delay that the kernel has counted while the thread slept. */
	u64 slept_delay_ns;
	/* How long the thread was throttled by a cgroup's quota, and the last such cgroup. */
	u64 throttled_ns;
	u64 quota_cgroup;
	/* Stack address of the arguments of the outermost call that is work; 0: none. */
	u64 work_frame;
	/* The IOPOLL ring that it last submitted to, or 0. */
	u64 polled_ring;
	/* The application's calls that woke the thread; counted on any CPU. */
	u64 wakeups;
	u64 submitted;
	u8 has_cpu;
	u8 has_work;
	/* enum throttled_by, from when it was last preempted or woken. */
	u8 throttled_by;
	u8 _unused_bytes[5];
	struct competitor competitors[COMPETITORS];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, SQ_THREADS);
	__type(key, u64);
	__type(value, struct sq_thread);
} sq_thread_by_identity SEC(".maps");

LOST_EVENTS(sq_lost, SQ_LOST_REASONS)

/* A record does not fit on a program's stack beside other variables. Never written. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct sq_thread);
} empty_sq_thread SEC(".maps");

/* The TID and, in units of 1.024 us, the creation time: TIDs are reused. */
static __always_inline u64 identity_of(const struct task_struct *task)
{
	return (task->start_time >> 10 << 32) | (u32)task->pid;
}

/* A reader takes the record again if its version was odd or has changed. */
static __always_inline void begin_change(struct sq_thread *thread)
{
	*(volatile u32 *)&thread->version = thread->version + 1;
	barrier();
}

static __always_inline void end_change(struct sq_thread *thread)
{
	barrier();
	*(volatile u32 *)&thread->version = thread->version + 1;
}

static __always_inline struct sq_thread *known_thread(const struct task_struct *task)
{
	u64 identity = identity_of(task);

	return bpf_map_lookup_elem(&sq_thread_by_identity, &identity);
}

/* Returns the thread's record, which is created if there was none. NULL for other threads. */
static __always_inline struct sq_thread *get_or_add_thread(struct task_struct *task, u64 now_ns, bool has_cpu)
{
	u64 identity = identity_of(task);
	struct sq_thread *thread, *empty;
	u32 zero = 0;

	thread = bpf_map_lookup_elem(&sq_thread_by_identity, &identity);
	if (thread || !is_sq_thread(task))
		return thread;
	empty = bpf_map_lookup_elem(&empty_sq_thread, &zero);
	if (!empty)
		return NULL;
	/* Another CPU may do the same: the first one's record counts. */
	bpf_map_update_elem(&sq_thread_by_identity, &identity, empty, BPF_NOEXIST);
	thread = bpf_map_lookup_elem(&sq_thread_by_identity, &identity);
	if (!thread) {
		lose(SQ_LOST_THREADS);
		return NULL;
	}
	if (__sync_val_compare_and_swap(&thread->born_ns, 0, task->start_time))
		return thread;
	begin_change(thread);
	thread->tid = task->pid;
	thread->own_tid = own_number(task);
	thread->own_tgid = own_number(task->group_leader);
	thread->known_since_ns = now_ns;
	thread->since_ns = now_ns;
	thread->first_run_delay_ns = task_run_delay_ns(task);
	thread->has_cpu = has_cpu;
	end_change(thread);
	return thread;
}

static __always_inline struct sq_thread *enrolled(struct task_struct *task, u64 now_ns)
{
	if (!(task->flags & PF_IO_WORKER))
		return NULL;
	return get_or_add_thread(task, now_ns, true);
}

/* Ends the current on-CPU time, and counts the round as what it has been. */
static __always_inline void close_round(struct sq_thread *thread, u64 now_ns)
{
	u64 round_ns = thread->round_ns + since(now_ns, thread->since_ns);

	if (thread->has_work)
		thread->working_ns += round_ns;
	else
		thread->spinning_ns += round_ns;
	thread->round_ns = 0;
	/* A program that was preempted after it had read the clock is late. */
	if (now_ns > thread->since_ns)
		thread->since_ns = now_ns;
}

/* Charges a wait to the thread that ran before. */
static __always_inline void charge(struct sq_thread *thread, struct task_struct *before, u64 waited_ns)
{
	struct competitor *least = &thread->competitors[0];

	/* Waking up an idle CPU is no competition. */
	if (!waited_ns || !before->pid)
		return;
	for (u32 i = 0; i < COMPETITORS; i++) {
		struct competitor *one = &thread->competitors[i];

		if (one->tid == (u32)before->pid) {
			one->waited_ns += waited_ns;
			return;
		}
		if (one->waited_ns < least->waited_ns)
			least = one;
	}
	/* Replace the competitor with the least delay. */
	least->waited_ns = waited_ns;
	least->tid = before->pid;
	least->shown_tid = shown_number(before);
	bpf_core_read(least->name, sizeof(least->name), &before->comm);
}

/* Tests for io_uring_enter() with IORING_ENTER_SQ_WAKEUP in its fourth argument, the flags. */
static __always_inline bool asks_to_wake_sq_thread(struct task_struct *task)
{
	return !(task->flags & PF_KTHREAD) && syscall_of(task) == IO_URING_ENTER && fourth_argument_of(task) & IORING_ENTER_SQ_WAKEUP;
}

/*
 * Returns the part of a stamped wait in which the thread did not sleep. A thread that is migrated while it sleeps on a run queue (delayed
 * dequeue, 6.12) keeps a stamp from then when it is dequeued, so that the kernel counts its sleep as a wait.
 */
static __always_inline u64 without_sleep(const struct sq_thread *thread, u64 waited_ns, u64 now_ns)
{
	u64 seen_ns;

	if (!thread->waits_since_ns)
		return waited_ns;
	seen_ns = since(now_ns, thread->waits_since_ns);
	return seen_ns + CLOCKS_APART_NS < waited_ns ? seen_ns : waited_ns;
}

/* `state` is the sleep state, or 0 if the thread stays runnable. */
static __always_inline void switch_out(struct sq_thread *thread, u64 now_ns, u32 state)
{
	begin_change(thread);
	/* It sleeps if it has nothing to do; within work, only if a file's own code waits for a signal. */
	if (state & TASK_INTERRUPTIBLE && thread->work_frame) {
		lose(SQ_LOST_EXITS);
		close_round(thread, now_ns);
		thread->has_work = false;
		thread->work_frame = 0;
	}
	if (state && !thread->has_work)
		close_round(thread, now_ns);
	else
		thread->round_ns += since(now_ns, thread->since_ns);
	thread->since_ns = now_ns;
	thread->has_cpu = false;
	/* The waker may have set it already. */
	if (!state)
		thread->waits_since_ns = now_ns;
	end_change(thread);
}

/* Returns the part of a finished wait before the quota was refilled, if that was used up when the wait started. */
static __noinline u64 throttled_part(const struct sq_thread *thread, const struct task_struct *task, u64 waited_ns, u64 now_ns)
{
	u64 began_ns = since(now_ns, waited_ns), filled_ns;

	if (thread->throttled_by != THROTTLED_BY_QUOTA || !may_be_throttled(task))
		return 0;
	filled_ns = since(cpu_quota_filled_ns(task, began_ns), began_ns);
	return filled_ns < waited_ns ? filled_ns : waited_ns;
}

static __always_inline void switch_in(struct sq_thread *thread, struct task_struct *task, struct task_struct *before, u64 waited_ns,
				      u64 now_ns)
{
	u64 awake_ns = without_sleep(thread, waited_ns, now_ns);
	u64 throttled_ns = throttled_part(thread, task, awake_ns, now_ns);

	begin_change(thread);
	if (throttled_ns) {
		struct task_group *group = group_with_quota(group_of(task));

		thread->throttled_ns += throttled_ns;
		thread->quota_cgroup = group ? cgroup_of_group(group) : 0;
	}
	thread->has_cpu = true;
	thread->since_ns = now_ns;
	thread->waits_since_ns = 0;
	thread->slept_delay_ns += waited_ns - awake_ns;
	/* Before that, no thread is to blame. */
	charge(thread, before, awake_ns - throttled_ns);
	end_change(thread);
}

static __always_inline void end_thread(struct sq_thread *thread, const struct task_struct *task, u64 now_ns)
{
	begin_change(thread);
	close_round(thread, now_ns);
	thread->has_cpu = false;
	thread->last_run_delay_ns = task_run_delay_ns(task);
	thread->ended_ns = now_ns;
	end_change(thread);
}

/* Tests for requests that are completed by polling a device: as the kernel does, this counts as work. */
static __always_inline bool polls_for_requests(const struct sq_thread *thread, const struct task_struct *task)
{
	const struct io_ring_ctx *ring = (const void *)thread->polled_ring;

	if (!ring)
		return false;
	/* A freed ring, or one in reused memory, has no or another thread. */
	return BPF_CORE_READ(ring, sq_data, thread) == task && ring_has_polled_requests(ring);
}
