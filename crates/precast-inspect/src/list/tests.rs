use precast_store::testing;

use super::*;

fn filled() -> (tempfile::TempDir, Store) {
    let (dir, store) = testing::store();
    let a = store
        .records()
        .put_artifact(&testing::artifact(&store, "a"))
        .unwrap();
    let b = store
        .records()
        .put_artifact(&testing::artifact(&store, "bbbb"))
        .unwrap();
    let one = store
        .records()
        .put_program(&testing::program("m", 1, &[a.id]))
        .unwrap();
    let two = store
        .records()
        .put_program(&testing::program("m", 16, &[a.id, b.id]))
        .unwrap();
    store
        .records()
        .put_program(&testing::program("m", 8, &[b.id]))
        .unwrap();
    store
        .releases()
        .put(&testing::release("m", None, &[one.id, two.id]))
        .unwrap();
    store
        .releases()
        .put(&testing::release("m", None, &[two.id]))
        .unwrap();
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
    let (_dir, store) = filled();
    let all = listing(&store, &Query::default());
    assert_eq!(
        all,
        [
            "batch=1 old",
            "batch=16 live",
            "batch=8 loose",
            "batch=32 failed"
        ]
    );
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
    let (_dir, store) = filled();
    let sorted = |sort: &str, descending| {
        let query = Query {
            sort: Some(order(sort)),
            descending,
            ..Query::default()
        };
        let all = listing(&store, &query);
        all.iter()
            .map(|row| {
                row.split(' ').next().unwrap()["batch=".len()..]
                    .parse::<i64>()
                    .unwrap()
            })
            .collect::<Vec<_>>()
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
    let (_dir, store) = filled();
    let path = store.path().to_owned();
    drop(store);
    let index = rusqlite::Connection::open(path.join("index.sqlite")).unwrap();
    index
        .execute("UPDATE programs SET steps=7 WHERE bucket='batch=16'", [])
        .unwrap();
    drop(index);
    let store = Store::open_read_only(&path).unwrap();
    let query = Query::default();
    let (rows, errors): (Vec<_>, Vec<_>) = list(&store, &query).partition(Result::is_ok);
    assert_eq!(rows.len(), 4);
    assert!(
        matches!(errors[..], [Err(StoreError::Row { .. })]),
        "{errors:?}"
    );
    let query = Query {
        sort: Some(order("age")),
        ..query
    };
    let (rows, errors): (Vec<_>, Vec<_>) = list(&store, &query).partition(Result::is_ok);
    assert_eq!((rows.len(), errors.len()), (4, 1));
}

#[test]
fn globs_times_and_devices_select_rows() {
    let (_dir, store) = filled();
    let count = |query: Query| listing(&store, &query).len();
    let all = Query::default;
    let glob = |text: &str| Some(Pattern::new(text).unwrap());
    assert_eq!(
        count(Query {
            bucket: glob("batch=1*"),
            ..all()
        }),
        2
    );
    assert_eq!(
        count(Query {
            module: glob("dec*"),
            ..all()
        }),
        0
    );
    assert_eq!(
        count(Query {
            until: Some(0),
            ..all()
        }),
        0
    );
    assert_eq!(
        count(Query {
            since: Some(0),
            ..all()
        }),
        4
    );
    assert_eq!(
        count(Query {
            device: Some("cuda".to_owned()),
            ..all()
        }),
        0
    );
}
