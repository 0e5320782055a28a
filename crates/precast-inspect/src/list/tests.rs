use precast_store::testing;

use super::*;

fn store() -> (tempfile::TempDir, Store) {
    let (dir, store) = testing::store();
    let [a, b] = ["a", "bbbb"].map(|name| testing::put_artifact(&store, name));
    let one = testing::put_program(&store, "m", 1, &[a.id]);
    let two = testing::put_program(&store, "m", 16, &[a.id, b.id]);
    testing::put_program(&store, "m", 8, &[b.id]);
    testing::put_release(&store, None, &[one.id, two.id]);
    testing::put_release(&store, None, &[two.id]);
    let mut failure = testing::failure(Digest::of(b"failed"), "no kernel");
    failure.bucket = "batch=32".into();
    store.records().put_failure(&failure).unwrap();
    (dir, store)
}

fn order(name: &str) -> Order {
    ORDERS.into_iter().find(|(own, _)| *own == name).unwrap().1
}

fn listing(store: &Store, query: &Query) -> Vec<String> {
    let row = |row: Result<Row, StoreError>| {
        let row = row.unwrap();
        format!("{} {}", row.bucket, row.state)
    };
    list(store, query).map(row).collect()
}

#[test]
fn states_follow_from_releases_and_failures() {
    let (_dir, store) = store();
    let all = listing(&store, &Query::default());
    let states = [
        "batch=1 old",
        "batch=16 live",
        "batch=8 loose",
        "batch=32 failed",
    ];
    assert_eq!(all, states);
    for (_, state) in State::ALL {
        let query = Query {
            state: Some(state),
            ..Query::default()
        };
        let none = state == State::Partial;
        assert_eq!(listing(&store, &query).len(), usize::from(!none), "{state}");
    }
    let three = testing::program("m", 8, &[]).id;
    let mut partial = testing::release("m", None, &[three]);
    partial.lacks = vec!["encode batch=16".to_owned()];
    store.releases().put(&partial).unwrap();
    let all = listing(&store, &Query::default());
    assert_eq!(all[1..3], ["batch=16 live", "batch=8 partial"]);
}

#[test]
fn rows_sort_by_number_and_both_ways() {
    let (_dir, store) = store();
    let sorted = |sort: &str, descending| {
        let query = Query {
            sort: Some(order(sort)),
            descending,
            ..Query::default()
        };
        let all = listing(&store, &query).into_iter();
        let batch = |row: String| row.split(['=', ' ']).nth(1).unwrap().parse().unwrap();
        all.map(batch).collect::<Vec<i64>>()
    };
    assert_eq!(sorted("bucket", false), [1, 8, 16, 32]);
    assert_eq!(sorted("bucket", true), [32, 16, 8, 1]);
    assert_eq!(sorted("size", true)[0], 16);
    assert_eq!(sorted("state", false), [16, 1, 8, 32]);
    for (name, _) in ORDERS {
        assert_eq!(sorted(name, false).len(), 4, "{name}");
    }
}

#[test]
fn a_damaged_index_is_an_error_and_the_files_are_listed() {
    let (_dir, store) = store();
    let path = store.path().to_owned();
    drop(store);
    let index = rusqlite::Connection::open(path.join("index.sqlite")).unwrap();
    let changed = index.execute("UPDATE programs SET steps=7 WHERE bucket='batch=16'", []);
    assert_eq!(changed, Ok(1));
    drop(index);
    let store = Store::open_read_only(&path).unwrap();
    let query = Query::default();
    let (rows, errors): (Vec<_>, Vec<_>) = list(&store, &query).partition(Result::is_ok);
    assert_eq!(rows.len(), 4);
    let of_a_row = matches!(errors[..], [Err(StoreError::Row { .. })]);
    assert!(of_a_row, "{errors:?}");
    let query = Query {
        sort: Some(order("age")),
        ..query
    };
    let (rows, errors): (Vec<_>, Vec<_>) = list(&store, &query).partition(Result::is_ok);
    assert_eq!((rows.len(), errors.len()), (4, 1));
}

#[test]
fn globs_times_and_devices_select_rows() {
    let (_dir, store) = store();
    let count = |narrow: &dyn Fn(&mut Query)| {
        let mut query = Query::default();
        narrow(&mut query);
        listing(&store, &query).len()
    };
    let glob = |text: &str| Some(Pattern::new(text).unwrap());
    assert_eq!(count(&|query| query.bucket = glob("batch=1*")), 2);
    assert_eq!(count(&|query| query.module = glob("dec*")), 0);
    assert_eq!(count(&|query| query.until = Some(0)), 0);
    assert_eq!(count(&|query| query.since = Some(0)), 4);
    assert_eq!(count(&|query| query.device = Some("cuda".to_owned())), 0);
}
