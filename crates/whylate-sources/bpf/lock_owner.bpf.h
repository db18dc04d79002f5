/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Reads the kernel lock on which a thread blocks, and the owner from the lock's owner word. */
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
	/* An rt_mutex of the kernel, or of a PI futex. */
	LOCK_RT_MUTEX,
	/* The thread flushes a work item that a worker runs. */
	LOCK_WORK_ITEM,
};

/* Flags in the owner words of mutexes and rwsems (kernel/locking). */
enum {
	/* The mutex was handed off to the thread in the owner word, which has not woken yet. */
	MUTEX_PICKUP = 4,
	OWNER_FLAGS = 7,
	RWSEM_READER_OWNED = 1,
	RWSEM_WRITER_LOCKED = 1,
	RWSEM_READERS_SHIFT = 8,
	RT_MUTEX_HAS_WAITERS = 1,
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

/* Whether task_struct.blocked_on points to a mutex. */
const volatile bool has_mutex_in_blocked_on = false;

static __always_inline bool set_holder(struct wait_for *wait, enum lock_kind kind, u64 holder)
{
	wait->kind = kind;
	wait->holder = holder;
	return holder != 0;
}

/* If `count` has no readers, `owner` may still name a reader that has released the lock. */
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

static __always_inline bool read_rt_mutex(struct wait_for *wait)
{
	const struct rt_mutex_base *lock = (const void *)wait->lock;

	return set_holder(wait, LOCK_RT_MUTEX, (u64)BPF_CORE_READ(lock, owner) & ~(u64)RT_MUTEX_HAS_WAITERS);
}

/* Returns whether the lock on which a thread blocks names its owner. The words of a lock that was freed read as 0. */
static __always_inline bool read_lock(const struct task_struct *task, struct wait_for *wait)
{
	u64 blocker;

	if (bpf_core_field_exists(task->pi_blocked_on) && task->pi_blocked_on) {
		wait->lock = (u64)BPF_CORE_READ(task, pi_blocked_on, lock);
		return read_rt_mutex(wait);
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
