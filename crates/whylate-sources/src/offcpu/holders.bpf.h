/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Which threads the blocked threads wait for, from the owner words of the kernel's locks. Other threads keep
 * running, so there are three walks: the first finds waits, the second confirms those that still have the same
 * holder, and the last reports both sides. A lock names its owner by address only; the owner's fields are read when the
 * last walk visits it, so that no memory of an exited thread is read.
 */
#pragma once

enum lock_kind {
	LOCK_NONE,
	LOCK_MUTEX,
	/* The last thread that took it may have released it. */
	LOCK_SEMAPHORE,
	/* Held by a writer. */
	LOCK_RWSEM,
	/* Held by readers. The owner word names the last reader that took it, which may have released it. */
	LOCK_RWSEM_READERS,
	/* Of the kernel, or of a PI futex. */
	LOCK_RT_MUTEX,
	/* The thread flushes a work item that a worker runs. */
	LOCK_WORK_ITEM,
};

enum holders_walk {
	HOLDERS_FIND,
	HOLDERS_CONFIRM,
	HOLDERS_REPORT,
};

/* Flags in the owner words of mutexes and rwsems (kernel/locking). */
enum {
	/* Handed off to that thread, which has not woken yet. */
	MUTEX_PICKUP = 4,
	OWNER_FLAGS = 7,
	RWSEM_READER_OWNED = 1,
	RWSEM_WRITER_LOCKED = 1,
	RWSEM_READERS_SHIFT = 8,
	RT_MUTEX_HAS_WAITERS = 1,
};

enum holders_limits {
	/* Waiters and holders. */
	HOLDERS = 65536,
	BARRIERS = 8,
};

/* A waiter. A holder that does not wait has an all-zero entry. */
struct wait_for {
	/* Address of the lock, or the function of the work item. */
	u64 lock;
	u64 holder;
	u64 switches;
	u32 kind;
	u32 is_confirmed;
};

struct holder_now {
	/* Addresses of task_structs, as IDs of threads. `holder` is 0 if the thread waits for no known holder. */
	u64 thread;
	u64 holder;
	/* Function of the work item that is waited for, and of the one that this thread runs. */
	u64 flushed;
	u64 handler;
	/* Time off CPU; 0: the thread is on a CPU. */
	u64 off_cpu_ns;
	/* enum lock_kind of what the thread waits for. */
	u32 kind;
	/* TID in whylate's PID namespace, and in the first one. */
	u32 shown;
	u32 tid;
	u32 state;
	s32 syscall;
	u8 is_kernel;
	/* The thread has not run since the last walk, so the walk captured the stack of this wait. */
	u8 is_as_walked;
	u8 unused[2];
	char comm[16];
};

struct {
	struct holder_now holder_now;
	enum lock_kind lock_kind;
	enum holders_walk holders_walk;
	enum holders_limits holders_limits;
} holder_layouts = {};

/* wq_barrier_func(); 0: threads that flush a work item are not found. */
const volatile u64 barrier_function = 0;
const volatile bool has_mutex_in_blocked_on = false;

u32 holders_walk = 0;

/* By the thread's address. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, HOLDERS);
	__type(key, u64);
	__type(value, struct wait_for);
} wait_by_thread SEC(".maps");

static __always_inline bool set_holder(struct wait_for *wait, enum lock_kind kind, u64 holder)
{
	wait->kind = kind;
	wait->holder = holder;
	return holder != 0;
}

/* Without readers in `count`, `owner` may still name one that has released the lock. */
static __always_inline bool read_rwsem(struct wait_for *wait)
{
	const struct rw_semaphore *lock = (const void *)wait->lock;
	u64 count, owner;

	if (!bpf_core_field_exists(lock->count) || !bpf_core_field_exists(lock->owner))
		return false;
	count = BPF_CORE_READ(lock, count.counter);
	owner = BPF_CORE_READ(lock, owner.counter);
	if (count & RWSEM_WRITER_LOCKED)
		return !(owner & RWSEM_READER_OWNED) && set_holder(wait, LOCK_RWSEM, owner & ~(u64)OWNER_FLAGS);
	return count >> RWSEM_READERS_SHIFT && owner & RWSEM_READER_OWNED &&
	       set_holder(wait, LOCK_RWSEM_READERS, owner & ~(u64)OWNER_FLAGS);
}

static __always_inline bool read_mutex(struct wait_for *wait)
{
	const struct mutex *lock = (const void *)wait->lock;
	u64 owner;

	if (!bpf_core_field_exists(lock->owner))
		return false;
	owner = BPF_CORE_READ(lock, owner.counter);
	return !(owner & MUTEX_PICKUP) && set_holder(wait, LOCK_MUTEX, owner & ~(u64)OWNER_FLAGS);
}

/* Whether the lock on which a thread blocks names its owner. A lock that was freed reads as 0. */
static __always_inline bool read_lock(const struct task_struct *task, struct wait_for *wait)
{
	u64 blocker;

	if (bpf_core_field_exists(task->pi_blocked_on) && task->pi_blocked_on) {
		const struct rt_mutex_base *lock = BPF_CORE_READ(task, pi_blocked_on, lock);

		wait->lock = (u64)lock;
		return set_holder(wait, LOCK_RT_MUTEX, (u64)BPF_CORE_READ(lock, owner) & ~(u64)RT_MUTEX_HAS_WAITERS);
	}
	blocker = blocker_of(task, has_mutex_in_blocked_on);
	if (!blocker)
		return false;
	wait->lock = blocker & ~(u64)BLOCKER_KINDS;
	switch (blocker & BLOCKER_KINDS) {
	case BLOCKER_MUTEX:
		return read_mutex(wait);
	case BLOCKER_SEMAPHORE:
		return set_holder(wait, LOCK_SEMAPHORE, last_holder_of(wait->lock));
	default:
		return read_rwsem(wait);
	}
}

static __always_inline void keep_wait(u64 thread, const struct wait_for *wait)
{
	struct wait_for *known, none = {};

	if (holders_walk == HOLDERS_FIND) {
		if (bpf_map_update_elem(&wait_by_thread, &thread, wait, BPF_ANY)) {
			lose(LOST_HOLDERS);
			return;
		}
		thread = wait->holder;
		known = bpf_map_lookup_elem(&wait_by_thread, &thread);
		if (!known && bpf_map_update_elem(&wait_by_thread, &thread, &none, BPF_NOEXIST))
			lose(LOST_HOLDERS);
		return;
	}
	known = bpf_map_lookup_elem(&wait_by_thread, &thread);
	if (known && known->kind == wait->kind && known->lock == wait->lock && known->holder == wait->holder &&
	    known->switches == wait->switches)
		known->is_confirmed = true;
}

/* flush_work() queues a barrier behind the item that a worker runs; the barrier is on the stack of the flushing thread. */
static __always_inline void read_barriers(const struct task_struct *task)
{
	const struct worker *worker = worker_of(task);
	const struct list_head *all = (const void *)worker + bpf_core_field_offset(struct worker, scheduled);
	const struct list_head *entry = BPF_CORE_READ(worker, scheduled.next);
	u64 handler = (u64)BPF_CORE_READ(worker, current_func);

	if (!barrier_function || !handler || handler == barrier_function || !bpf_core_type_exists(struct wq_barrier))
		return;
	for (u32 i = 0; i < BARRIERS && entry && entry != all; i++) {
		const struct work_struct *work = (const void *)entry - bpf_core_field_offset(struct work_struct, entry);
		const struct wq_barrier *barrier = (const void *)work - bpf_core_field_offset(struct wq_barrier, work);

		if ((u64)BPF_CORE_READ(work, func) == barrier_function) {
			const struct task_struct *flusher = BPF_CORE_READ(barrier, task);
			struct wait_for wait = { .lock = handler, .holder = (u64)task, .kind = LOCK_WORK_ITEM };

			wait.switches = BPF_CORE_READ(flusher, nvcsw) + BPF_CORE_READ(flusher, nivcsw);
			keep_wait((u64)flusher, &wait);
		}
		entry = BPF_CORE_READ(entry, next);
	}
}

static __always_inline bool is_blocked(const struct task_struct *task)
{
	return !task->on_cpu && task->__state & ~TASK_WAKING;
}

static __always_inline void report_holder(struct task_struct *task, struct bpf_iter__task *ctx)
{
	u64 thread = (u64)task, now_ns = bpf_ktime_get_ns();
	struct holder_now now = {};
	struct thread_record *record;
	struct wait_for *wait;

	wait = bpf_map_lookup_elem(&wait_by_thread, &thread);
	if (!wait || task->exit_state)
		return;
	now.thread = thread;
	if (wait->is_confirmed && wait->switches == switches_of(task) && is_blocked(task)) {
		now.holder = wait->holder;
		now.kind = wait->kind;
		if (now.kind == LOCK_WORK_ITEM)
			now.flushed = wait->lock;
		record = record_of(task);
		now.is_as_walked = record && record->is_known && record->switches == wait->switches;
	}
	now.state = state_of(task);
	if (now.state != STATE_ON_CPU) {
		now.off_cpu_ns = now_ns - since_of(task, task->start_time, now_ns);
		if (!now.off_cpu_ns)
			now.off_cpu_ns = 1;
	}
	now.shown = shown_number(task);
	now.tid = task->pid;
	now.is_kernel = (task->flags & PF_KTHREAD) != 0;
	now.syscall = now.is_kernel ? -1 : syscall_of(task);
	if (task->flags & PF_WQ_WORKER)
		now.handler = handler_of_worker(task);
	BPF_CORE_READ_STR_INTO(&now.comm, task, comm);
	bpf_seq_write(ctx->meta->seq, &now, sizeof(now));
}

/* 0.2 us per thread and walk. Lock words are read only for threads that are off CPU and not runnable. */
SEC("iter/task")
int on_each_thread_tell_holder(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;
	struct wait_for wait = {};

	if (!task)
		return 0;
	if (holders_walk == HOLDERS_REPORT) {
		report_holder(task, ctx);
		return 0;
	}
	if (task->flags & PF_WQ_WORKER)
		read_barriers(task);
	if (task->exit_state || task->tgid == own_tgid || !is_blocked(task))
		return 0;
	wait.switches = switches_of(task);
	if (!read_lock(task, &wait))
		return 0;
	/* The thread itself took it last, so it was released: no thread waits for itself this way. */
	if (wait.holder == (u64)task && (wait.kind == LOCK_SEMAPHORE || wait.kind == LOCK_RWSEM_READERS))
		return 0;
	keep_wait((u64)task, &wait);
	return 0;
}
