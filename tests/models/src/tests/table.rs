//! A handle names one object as long as it is there, and nothing afterwards.

use std::sync::Arc;

use loom::thread;
use crate::engine::handle::Kind;
use crate::engine::table::Table;

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.max_branches = 20_000;
    let model = Arc::new(model);
    builder.check(move || {
        let model = Arc::clone(&model);
        // The table is too large for loom's ordinary stacks.
        let thread = thread::Builder::new().stack_size(1 << 20).spawn(move || model());
        thread.unwrap().join().unwrap();
    });
}

#[test]
fn a_look_up_beside_a_removal_finds_the_right_object_or_none() {
    check(|| {
        let table: Arc<Table<u32>> = Arc::new(Table::new(Kind::Comm));
        let first = table.insert(Arc::new(1)).unwrap().encode();
        let other = {
            let table = Arc::clone(&table);
            thread::spawn(move || {
                table.remove(first).unwrap();
                table.insert(Arc::new(2)).unwrap().encode()
            })
        };
        for _ in 0..2 {
            assert!(table.get(first).map_or(1, |object| *object) == 1, "a stale handle names another object");
            assert!(table.with(first, |object| Ok(*object)).unwrap_or(1) == 1);
        }
        let second = other.join().unwrap();
        assert!(table.get(first).is_err() && second != first);
        assert_eq!(*table.get(second).unwrap(), 2);
    });
}

#[test]
fn an_object_is_removed_once() {
    check(|| {
        let table: Arc<Table<u32>> = Arc::new(Table::new(Kind::Comm));
        let handle = table.insert(Arc::new(1)).unwrap().encode();
        let other = {
            let table = Arc::clone(&table);
            thread::spawn(move || table.remove(handle).is_ok())
        };
        let here = table.remove(handle).is_ok();
        assert!(here != other.join().unwrap());
        assert!(table.is_empty());
    });
}
