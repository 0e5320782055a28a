//! A bounded number of items for any number of callers: each caller has exclusive use of an item, and callers beyond
//! the limit wait.

use std::{
    sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError},
    thread,
    time::{Duration, Instant},
};

/// The maximum wait of a caller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Wait {
    #[default]
    Forever,
    /// Until that time; a past time means no wait.
    Until(Instant),
}

impl Wait {
    /// Returns the wait that ends after `limit`; without end where the clock does not go so far.
    pub fn up_to(limit: Duration) -> Self {
        let end = Instant::now().checked_add(limit);
        end.map_or(Self::Forever, Self::Until)
    }

    /// Returns a wait that is over.
    pub fn no() -> Self {
        Self::Until(Instant::now())
    }

    /// Returns the remaining time; none without a limit.
    fn left(self) -> Option<Duration> {
        match self {
            Self::Forever => None,
            Self::Until(end) => Some(end.saturating_duration_since(Instant::now())),
        }
    }
}

/// Locks `mutex`; none if the wait ended first.
///
/// A mutex has no wait with a limit, so the lock is tried repeatedly. Only a call that hangs holds one of these for
/// long.
pub(super) fn lock<T>(mutex: &Mutex<T>, wait: Wait) -> Option<MutexGuard<'_, T>> {
    const FIRST: Duration = Duration::from_micros(20);
    const LONGEST: Duration = Duration::from_millis(2);
    if wait == Wait::Forever {
        return Some(mutex.lock().unwrap_or_else(PoisonError::into_inner));
    }
    let mut pause = FIRST;
    loop {
        match mutex.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => {}
        }
        let left = wait.left().filter(|left| !left.is_zero())?;
        thread::sleep(pause.min(left));
        pause = (pause * 2).min(LONGEST);
    }
}

/// Idle items, and the number of all items.
pub(super) struct Pool<T> {
    state: Mutex<Items<T>>,
    returned: Condvar,
    limit: usize,
}

struct Items<T> {
    idle: Vec<T>,
    made: usize,
    waiting: usize,
}

/// A caller's place in a pool. A drop returns its item to the pool. If the item was lost, as in a panic, the next
/// caller may create a new one.
pub(super) struct Place<'a, T> {
    pool: &'a Pool<T>,
    pub item: Option<T>,
}

impl<T> Pool<T> {
    /// Starts with none.
    pub fn new(limit: usize) -> Self {
        let limit = limit.max(1);
        Self {
            state: Mutex::new(Items {
                idle: Vec::with_capacity(limit.min(64)),
                made: 0,
                waiting: 0,
            }),
            returned: Condvar::new(),
            limit,
        }
    }

    /// Starts with one item, and creates no other.
    pub fn of(item: T) -> Self {
        let pool = Self::new(1);
        {
            let mut state = pool.lock();
            state.idle.push(item);
            state.made = 1;
        }
        pool
    }

    /// Drops the idle items. Later callers create new ones.
    pub fn drop_idle(&self) {
        let idle = {
            let mut state = self.lock();
            state.made -= state.idle.len();
            std::mem::take(&mut state.idle)
        };
        drop(idle);
    }

    /// Returns the maximum number of items.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Returns the number of places that callers have.
    pub fn taken(&self) -> usize {
        let state = self.lock();
        state.made - state.idle.len()
    }

    /// Takes a place, with an idle item if there is one; none if the wait ended first. The caller creates a missing
    /// item.
    pub fn take(&self, wait: Wait) -> Option<Place<'_, T>> {
        let mut state = self.lock();
        loop {
            let item = state.idle.pop();
            if item.is_some() || state.made < self.limit {
                state.made += usize::from(item.is_none());
                return Some(Place { pool: self, item });
            }
            let left = wait.left();
            if left.is_some_and(|left| left.is_zero()) {
                return None;
            }
            state.waiting += 1;
            state = match left {
                None => (self.returned.wait(state)).unwrap_or_else(PoisonError::into_inner),
                Some(left) => {
                    let waited = self.returned.wait_timeout(state, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
            state.waiting -= 1;
        }
    }

    /// Notifies a waiting caller. A notification is a system call, so there is none while no caller waits.
    fn wake(&self, state: MutexGuard<'_, Items<T>>) {
        let waited = state.waiting > 0;
        drop(state);
        if waited {
            self.returned.notify_one();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Items<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Drop for Place<'_, T> {
    fn drop(&mut self) {
        let mut state = self.pool.lock();
        match self.item.take() {
            Some(item) => state.idle.push(item),
            None => state.made -= 1,
        }
        self.pool.wake(state);
    }
}

#[cfg(test)]
mod tests {
    use std::{
        panic::{AssertUnwindSafe, catch_unwind},
        sync::atomic::{AtomicUsize, Ordering},
        thread,
    };

    use super::*;

    type Worked = Option<Result<usize, ()>>;

    /// Runs `work` on an item, as a call does.
    fn with<R>(
        pool: &Pool<usize>,
        wait: Wait,
        make: impl FnOnce(Option<usize>) -> Result<usize, ()>,
        work: impl FnOnce(&mut usize) -> Result<R, ()>,
    ) -> Option<Result<R, ()>> {
        let mut place = pool.take(wait)?;
        Some(make(place.item.take()).and_then(|mut item| {
            let result = work(&mut item);
            place.item = Some(item);
            result
        }))
    }

    fn make(item: Option<usize>) -> Result<usize, ()> {
        Ok(item.unwrap_or(7))
    }

    /// Takes an item. Creates a missing one.
    fn taken(pool: &Pool<usize>, wait: Wait) -> Option<Place<'_, usize>> {
        let mut place = pool.take(wait)?;
        place.item = make(place.item.take()).ok();
        Some(place)
    }

    #[test]
    fn never_more_than_the_limit_and_nobody_waits_for_ever() {
        let pool = Pool::new(3);
        let [using, most, made] = [0; 3].map(AtomicUsize::new);
        let caller = |number: usize| {
            for call in 0..2000 {
                // Some are broken and thrown away.
                let make = |item: Option<usize>| match (call + number) % 97 {
                    0 => Err(()),
                    _ => Ok(item.unwrap_or_else(|| made.fetch_add(1, Ordering::SeqCst))),
                };
                let work = |_: &mut usize| {
                    let now = using.fetch_add(1, Ordering::SeqCst) + 1;
                    most.fetch_max(now, Ordering::SeqCst);
                    thread::yield_now();
                    using.fetch_sub(1, Ordering::SeqCst);
                    Ok(())
                };
                let worked = with(&pool, Wait::Forever, make, work).unwrap();
                assert_eq!(worked.is_err(), (call + number).is_multiple_of(97));
            }
        };
        thread::scope(|scope| {
            let caller = &caller;
            (0..16).for_each(|number| drop(scope.spawn(move || caller(number))));
        });
        assert!((1..=3).contains(&most.load(Ordering::SeqCst)));
        let state = pool.lock();
        assert_eq!((state.waiting, state.idle.len()), (0, state.made));
        assert!(made.load(Ordering::SeqCst) > 3, "lost ones are made again");
    }

    #[test]
    fn a_panic_loses_nothing_but_the_one_it_met() {
        let pool = Pool::new(2);
        let panics = |work: &dyn Fn()| {
            let caught = catch_unwind(AssertUnwindSafe(work));
            assert!(caught.is_err());
        };
        for _ in 0..8 {
            // A panic during the creation, and during the use.
            panics(&|| {
                let worked: Worked = with(&pool, Wait::no(), |_| panic!("as meant"), |_| Ok(1));
                worked.unwrap().unwrap();
            });
            panics(&|| {
                let worked: Worked = with(&pool, Wait::no(), make, |_| panic!("as meant"));
                worked.unwrap().unwrap();
            });
            // An error of the work does not lose the item.
            let worked = with(&pool, Wait::no(), make, |_| Err::<(), _>(()));
            assert_eq!(worked, Some(Err(())));
            assert_eq!(pool.lock().idle.len(), 1);
        }
        let first = taken(&pool, Wait::no());
        let second = taken(&pool, Wait::no());
        assert!(first.is_some() && second.is_some());
        drop((first, second));
        let state = pool.lock();
        assert_eq!((state.made, state.idle.len()), (2, 2));
    }

    #[test]
    fn a_wait_ends_when_it_is_to() {
        let pool = Pool::new(1);
        let held = taken(&pool, Wait::Forever).unwrap();
        let worked: Worked = with(&pool, Wait::no(), make, |item| Ok(*item));
        assert_eq!(worked, None);
        let begun = Instant::now();
        assert!(pool.take(Wait::up_to(Duration::from_millis(50))).is_none());
        assert!(begun.elapsed() >= Duration::from_millis(50));
        thread::scope(|scope| {
            let waits = scope.spawn(|| pool.take(Wait::up_to(Duration::from_secs(60))).is_some());
            thread::sleep(Duration::from_millis(20));
            drop(held);
            assert!(waits.join().unwrap());
        });
        assert_eq!(Wait::up_to(Duration::MAX), Wait::Forever);
    }

    #[test]
    fn a_lock_is_waited_for_as_long_as_is_said() {
        let mutex = Mutex::new(());
        let guard = lock(&mutex, Wait::no()).unwrap();
        thread::scope(|scope| {
            let short =
                scope.spawn(|| lock(&mutex, Wait::up_to(Duration::from_millis(20))).is_none());
            assert!(short.join().unwrap());
            let long = scope.spawn(|| lock(&mutex, Wait::up_to(Duration::from_secs(60))).is_some());
            thread::sleep(Duration::from_millis(10));
            drop(guard);
            assert!(long.join().unwrap());
        });
        assert!(lock(&mutex, Wait::Forever).is_some());
    }
}
