"""What do the tests of the runtime share?"""

from tests import server_fixtures

nats = server_fixtures.nats
